/* process does to its threads and its parent what programs in containers do. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static char **command; /* of the second thread; nothing if it stays */

static void *second(void *first)
{
	if (first)
		pthread_join(*(pthread_t *)first, NULL);
	if (*command) {
		execv(*command, command);
		perror(*command);
		_exit(127);
	}
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	static pthread_t self, other;
	if (argc < 2)
		return 2;
	if (!strcmp(argv[1], "die-with-parent")) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		usleep(300000);
		puts("lived");
		return 0;
	}
	int ends = !strcmp(argv[1], "first-thread-ends");
	command = argv + 2;
	self = pthread_self();
	if (pthread_create(&other, NULL, second, ends ? &self : NULL))
		return 1;
	if (ends)
		pthread_exit(NULL);
	for (;;)
		pause();
}
